"""What the transports of GPU memory share. It needs `mx.cuda`; the rest of the toolkit does not."""
