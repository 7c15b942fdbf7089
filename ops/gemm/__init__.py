"""GEMM fused with all-gather, reduce-scatter or all-reduce."""
