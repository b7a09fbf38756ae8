"""A job as a service of systemd: which files that takes, and putting them where they belong."""
