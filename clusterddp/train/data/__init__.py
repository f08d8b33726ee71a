"""The images and labels of a run: their files, which rank sees which, and their augmentation."""
