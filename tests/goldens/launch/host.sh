# 1. train
valkyrie-train model=gpt_tiny 'prompt=two words' name=mine
