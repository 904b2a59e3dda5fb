"""What frames are, by their kind: those of this room end the range, those of its users begin it."""

GATHER = 255
CAUSE = 254
BYE = 253
ASK = 252
ANSWER = 251
