"""``prfaas calibrate``: fit the transform codec to a model."""
