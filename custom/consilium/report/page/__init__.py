"""Pages of runs, sites and studies, for `consilium report`, `compare` and `data check`: one HTML file each, complete in itself.

Others may have written the files of a run. So files are read up to a size limit and never through a link, and numbers are
checked. Names go through `sanitize.shown` and the templates' escaping. Pictures are decoded and encoded again.
"""
