"""How the package gets onto a hospital's machine and keeps running: wheelhouse, bill of materials, unit, runtimes."""
