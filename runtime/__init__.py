DeadlockError=SymmetricTensor=barrier=finalize=init=rank=symmetric=world_size=None
