"""The simulation in one process or in several: server and clients without FLARE."""
