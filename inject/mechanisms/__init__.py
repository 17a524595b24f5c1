"""How each kind of fault is carried out on a lab: place, holder request, commands and witnesses."""
