"""The parts of `train.report`: runs read, compared, judged, drawn and written."""
