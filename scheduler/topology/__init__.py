"""The interconnect of one cluster as a graph, the route of each transfer in it, and what models say of both."""
