"""Words in urls and options of stores. Imports no client: whoever reads recipes needs none."""

OBJECT_SCHEMES = ("s3", "gs", "az")
"""Of urls that an object store stands behind, reached over a network."""
