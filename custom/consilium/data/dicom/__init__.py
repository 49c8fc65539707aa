"""Volumes in DICOM: one file, several frames in one file, or a folder that holds a series.

files.py opens files within bounds, frames.py reads headers (the positions of frames), pixels.py the values, and masks.py
segmentations and contours. They need the extra `dicom`. Recognising a DICOM file does not, see safe_open.py.

highdicom writes segmentations. It is not used to read: its get_volume refuses images without a position or a frame of
reference, and tilted gantries. It takes images of two patients as one volume, and a slope of 0 as 1. A mask of another frame of
reference passes its match_geometry.
"""
