"""Volumes in DICOM: one file, several frames in one file, or a folder that holds a series.

files.py opens files, parsing.py parses them within bounds, frames.py reads headers (the positions of frames), pixels.py the
values, palette.py colour tables, and masks.py segmentations and contours. They need the extra `dicom`. Recognising a DICOM file
does not, see file_kinds.py.
"""
