"""One Kubeflow step per stage: declarations only, the work is in seqrec.stages."""
