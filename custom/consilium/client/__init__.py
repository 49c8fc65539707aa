"""The client's side of a run: data, training, evaluation, models that it keeps."""
