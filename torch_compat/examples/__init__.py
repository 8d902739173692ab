"""Example programs; `README.md` of this folder says how to run them."""
