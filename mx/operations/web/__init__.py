"""The page of `mx web`: what a coordinator knows, live in a browser, read only.

`follow` keeps one subscription to the coordinator, whatever number of browsers there is, and writes
`rows` to a `board`; `server` sends each browser what of the board has changed since it last read.
"""
