"""`python -m mx` is `mx`."""

from mx.cli import main

if __name__ == "__main__":
    main()
