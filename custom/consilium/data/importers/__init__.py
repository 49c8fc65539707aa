"""Importers: the published folder layouts of known data sets, turned into a data list per site."""
