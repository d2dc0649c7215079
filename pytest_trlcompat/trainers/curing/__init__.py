"""How cures are declared, collected and put in front of a trainer; nothing here cures anything by itself."""
