"""The strings that name the cells of a boundary, as disjoint events for any tokenizers."""
