"""A wide-area link on one machine: two network namespaces, a TUN device in each, and a process that carries packets."""
