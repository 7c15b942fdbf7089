"""Functions with the signatures of other libraries."""
