"""The benchmarks of mx against bare mechanisms, run by `mx bench`."""
