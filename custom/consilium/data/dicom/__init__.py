"""Volumes in DICOM: one file, several frames in one file, or a folder that holds a series.

The reading itself is in files.py (files), frames.py (headers: where frames lie), pixels.py (values) and masks.py
(segmentations, contours). They need the extra `dicom`; knowing a DICOM file when one sees it does not.
"""
