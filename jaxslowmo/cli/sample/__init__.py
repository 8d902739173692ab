"""`jaxslowmo sample`: text from the model of a run."""
