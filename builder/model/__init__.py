"""The model as small torch modules on the meta device, whose heavy operations are plugin operators."""
