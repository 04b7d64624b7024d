"""Lance: text to image with two complete sets of weights, one that understands and one that draws."""
