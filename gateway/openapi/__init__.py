"""The API described for machines: one document, made from the routes and from what is read and answered there."""
