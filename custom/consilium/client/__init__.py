"""The client's side of a run: its data, training, evaluation, and the models that it stores."""
