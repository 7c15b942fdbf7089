def multicast_refusal():
    return "the machine has no NVLink multicast"
