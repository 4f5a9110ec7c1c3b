"""From logits to tokens: the pipeline (sampler), which tokens a row may still draw (filters), the draw itself (noise).

Nothing here knows about requests, blocks or text; a row of logits comes with a row of parameters.
"""
