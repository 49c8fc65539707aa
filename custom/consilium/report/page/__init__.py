"""`consilium report`: a run, a site's part of it or a study as one HTML page that needs nothing from elsewhere.

All that it reads may have been written by others. So files are read up to a bound and never by way of a link, numbers are
checked, names go through clean.shown and the template's escaping, and pictures are decoded and written anew.
"""
