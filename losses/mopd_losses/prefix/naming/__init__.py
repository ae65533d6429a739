"""Which strings name the cells of a boundary, so that these are disjoint for any tokenizers."""
