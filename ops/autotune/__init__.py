"""Choice of the fastest program: cost model, trials on the GPU, and the store of results."""
