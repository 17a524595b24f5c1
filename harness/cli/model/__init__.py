"""Commands of the model, which touch no lab: predict, calibrate, congestion."""
