"""Installation on a hospital's machine: wheelhouse, bill of materials, systemd unit, container and cluster runtimes."""
