"""`jaxslowmo tune`: settings, measured on the devices at hand."""
