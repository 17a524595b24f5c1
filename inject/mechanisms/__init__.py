"""How each kind of fault is done on a lab: places, requests to holders, commands and witnesses."""
