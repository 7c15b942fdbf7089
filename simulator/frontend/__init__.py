"""Translation of tile IR into steps of the simulator."""
