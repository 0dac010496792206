"""What `train.diagnose` asks of a step that went wrong, in the order in which it is asked.

case            the state, the batch and what the run wrote down
trial           what is tried out: gradients under a precision, a few steps of training
evidence        what the trials gave; each is run when it is first asked for
finding         one line of the enquiry
any_precision   lines that 16 bits have no part in: data, weights, float32, learning rate
sixteen_bits    lines about 16 bits: range or precision, loss scale, order, one operation
questions       the list, and the verdict
bisect          the smallest set of scopes that must stay float32
"""
