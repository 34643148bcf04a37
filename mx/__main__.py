"""Makes `python -m mx` run the command `mx`."""

from mx.cli import main

if __name__ == "__main__":
    main()
