"""Tools that judge the tests."""
