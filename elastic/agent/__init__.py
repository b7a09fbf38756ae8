"""The daemon: one agent per node. It observes, decides, acts and tells systemd, in that order, in one loop."""
