"""What mx is measured with: the race against bare mechanisms, run by `mx bench`."""
