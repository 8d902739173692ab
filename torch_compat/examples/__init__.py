"""Programs to start from; `README.md` of this folder says how to run them."""
