"""One worker's part in DiLoCo and LocalSGD, whatever framework takes its inner steps.

DiLoCo: https://arxiv.org/abs/2311.08105; with fragments, delay and mixing: https://arxiv.org/abs/2501.18512.

A `worker` counts inner steps, and synchronizes each `fragment` of the model when its turn has come by the `plan`.
"""
