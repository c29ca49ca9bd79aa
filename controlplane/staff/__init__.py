"""Django's admin site for owners in an emergency: what rows there are, past all pages of the console. It only reads."""
