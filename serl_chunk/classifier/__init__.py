"""Success classifiers: frames with labels, the network, its training, its figures and its files."""
