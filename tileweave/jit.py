compile=jit=None
