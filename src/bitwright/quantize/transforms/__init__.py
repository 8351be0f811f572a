"""What is done to a tensor before it is quantised, one file a transform; each module defines TRANSFORMS."""
