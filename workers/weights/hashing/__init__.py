"""Hash the elements of tensors; engines import its files too, so these import torch alone."""
