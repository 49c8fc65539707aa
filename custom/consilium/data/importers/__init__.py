"""Importers: they read a user's own folders or published data sets, and write a data list per site."""
